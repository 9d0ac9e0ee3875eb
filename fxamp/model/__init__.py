"""What the user gets back, and what runs it: the state, the graphs of its calls, and which of them a call takes."""
