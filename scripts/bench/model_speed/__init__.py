"""Speed of full-size transformers with random weights, as their pipelines call them."""
