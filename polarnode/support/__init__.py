"""What every waiting room uses: background services, processes, semaphores, counters, loop lag."""
