"""Memory: buffers, copies between device and host, and the placement of masters and weights."""
