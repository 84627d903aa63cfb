"""Train many LoRA jobs on one frozen backbone, each as if it trained alone."""

__version__ = "0.2.0"
