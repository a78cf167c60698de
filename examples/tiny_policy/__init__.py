"""How `polarnode-tiny`, the embedded default model, is made: tasks, demonstrations, training, evaluation."""
