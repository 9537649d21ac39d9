"""The whole of the benchmarks on a server of their own: `make bench`, `make bench-quick`, `make bench-peers`."""
