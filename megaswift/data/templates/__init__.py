"""From conversations to text: chat templates, tools, and the parts that are trained."""
