"""The whole job in one go: a small model from random weights to answers, and a page that shows it."""
