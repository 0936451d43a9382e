"""Wire shapes: pure functions and small sans-I/O decoders.

Nothing here opens a socket, reads a clock or keeps a global. A function turns a dict into a dict and never
changes its argument; a decoder turns bytes into events and waits for nothing.
"""
