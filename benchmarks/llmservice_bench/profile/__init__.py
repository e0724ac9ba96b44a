"""What a model's steps spend their time on, and what this machine would allow."""
