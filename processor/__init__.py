"""The stream processor: reserves due e-mails, plans them into chunks and tracks what became of them."""
