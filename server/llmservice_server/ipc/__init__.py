"""The two processes of a server, and the messages between them."""
