"""Images and videos: their files, their place in a conversation, and the inputs of vision encoders."""
