"""One file a training method, each a Task for the one loop."""
