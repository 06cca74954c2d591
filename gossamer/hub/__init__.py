"""Connects Gossamer with libraries of Hugging Face: a quantizer for transformers, and adapters of peft. Its files import those
libraries.
"""
