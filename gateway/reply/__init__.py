"""What a reply consists of: content, reasoning and tool calls."""
