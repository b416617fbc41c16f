"""Storage: local folders and object stores behind one protocol; locks, rename markers, a thread pool."""
