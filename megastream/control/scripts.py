"""Lua that the server runs, so that what belongs together happens at once. Keys: log, state, blobs of one run.

`state` is a hash: `records` (number of the newest record), `incarnation`, `version`, `writer:<id>` (a writer's last
append, so that an append repeated after a lost reply is not doubled), `kept:<id>` (what this writer has published is
here) and `seen:<engine>/<rank>` (when that engine rank was here last, in seconds of the server's clock).
"""

APPEND = """
local field = 'writer:' .. ARGV[1]
local last = redis.call('HGET', KEYS[2], field)
if last then
  local turn, id, number = string.match(last, '^(%d+) (%S+) (%d+)$')
  if turn == ARGV[2] then return {id, number} end
end
local number = redis.call('HINCRBY', KEYS[2], 'records', 1)
local id = redis.call('XADD', KEYS[1], 'MAXLEN', '~', ARGV[5], '*', 'number', number, 'message', ARGV[3])
redis.call('HSET', KEYS[2], field, ARGV[2] .. ' ' .. id .. ' ' .. number)
for _, key in ipairs(KEYS) do redis.call('EXPIRE', key, ARGV[4]) end
return {id, tostring(number)}
"""
"""Arguments: writer, its turn, message, seconds to live, how many records the log keeps (about). Id and number."""

KEEP = """
for i = 1, 2 do
  local value = tonumber(redis.call('HGET', KEYS[2], ARGV[2 * i]) or '-1') or -1
  if tonumber(ARGV[2 * i + 1]) > value then redis.call('HSET', KEYS[2], ARGV[2 * i], ARGV[2 * i + 1]) end
end
redis.call('HSET', KEYS[2], 'seen:' .. ARGV[7], redis.call('TIME')[1])
for _, key in ipairs(KEYS) do redis.call('EXPIRE', key, ARGV[1]) end
return {redis.call('HEXISTS', KEYS[2], 'kept:' .. ARGV[6]), redis.call('HGET', KEYS[2], 'records') or '0'}
"""
"""Arguments: seconds to live, then two times a name of `state` and a value that it is raised to, never lowered; the
writer; the name under which it is seen. Always writes, so that readers too notice a server that takes no writes.
Answers 0 when what this writer has published is not there (any more), else 1; and the newest record's number.
"""

SEEN = """
local seen = redis.call('HGET', KEYS[2], 'seen:' .. ARGV[1])
if not seen then return -1 end
return redis.call('TIME')[1] - seen
"""
"""Argument: a name. Whole seconds since it was seen, -1 for never."""
