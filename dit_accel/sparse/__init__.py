"""Which pairs of tokens does a computed step attend to?"""
