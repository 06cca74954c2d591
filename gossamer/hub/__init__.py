"""Where models of Hugging Face's libraries meet ours: transformers' quantizers and peft's adapters. Its files import those
libraries.
"""
