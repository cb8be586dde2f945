"""Exchange of encoded gradients between processes, and the state it keeps."""
