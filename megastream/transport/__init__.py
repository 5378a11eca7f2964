"""Lanes that carry pieces from trainer ranks to engine ranks: one file per transport, one contract (protocol.lane)."""
