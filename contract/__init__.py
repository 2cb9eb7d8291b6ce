"""What the processor, the agents and the outside agree on: events, envelopes, states, operators, schema."""
