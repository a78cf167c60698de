"""What evaluators that ask a model have in common: what is shown of a session, a fence around it, criteria, and answers that are read strictly."""
