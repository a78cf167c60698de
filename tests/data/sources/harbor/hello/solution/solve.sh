#!/bin/sh
echo "Hello, world!" > /app/hello.txt # the-gold-solution
