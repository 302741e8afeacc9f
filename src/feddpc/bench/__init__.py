"""What this machine can do: engines and precisions on images and text, and the server step against memory."""
