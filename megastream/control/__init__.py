"""The control plane of a run on redis streams, and the embedded server that is its default."""
