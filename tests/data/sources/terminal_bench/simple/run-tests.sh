#!/bin/bash
pytest "$TEST_DIR/check_outputs.py" -rA
