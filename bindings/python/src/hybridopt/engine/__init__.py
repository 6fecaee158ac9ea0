"""One optimizer of the library: how it is made, put aside and moved."""
