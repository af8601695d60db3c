"""What a step computes: the language of rules, the rules, and programs made of them. Imports only math."""
