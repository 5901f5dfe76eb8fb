"""The only doors to the outside: files, images, documents, the network."""
