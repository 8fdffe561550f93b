"""From a response to a number: rule scorers chosen by data source, and the limits they run under."""
