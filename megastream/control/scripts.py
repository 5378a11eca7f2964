"""Lua that the server runs, so that what belongs together happens at once. Keys: log, state, blobs of one run.

`state` is a hash: `records` (number of the newest record), `incarnation`, `version`, and `writer:<id>` (a writer's last
append, so that an append repeated after a lost reply is not doubled).
"""

APPEND = """
local field = 'writer:' .. ARGV[1]
local last = redis.call('HGET', KEYS[2], field)
if last then
  local turn, id = string.match(last, '^(%d+) (.+)$')
  if turn == ARGV[2] then return id end
end
local number = redis.call('HINCRBY', KEYS[2], 'records', 1)
local id = redis.call('XADD', KEYS[1], '*', 'number', number, 'message', ARGV[3])
redis.call('HSET', KEYS[2], field, ARGV[2] .. ' ' .. id)
for _, key in ipairs(KEYS) do redis.call('EXPIRE', key, ARGV[4]) end
return id
"""
"""Arguments: writer, its turn, message, seconds to live. The record's id."""

KEEP = """
for i = 1, 2 do
  local value = tonumber(redis.call('HGET', KEYS[2], ARGV[2 * i]) or '-1')
  if tonumber(ARGV[2 * i + 1]) > value then redis.call('HSET', KEYS[2], ARGV[2 * i], ARGV[2 * i + 1]) end
end
for _, key in ipairs(KEYS) do redis.call('EXPIRE', key, ARGV[1]) end
"""
"""Arguments: seconds to live, then two times a name of `state` and a value that it is raised to, never lowered."""
