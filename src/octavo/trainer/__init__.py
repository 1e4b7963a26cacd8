"""``octavo train``: one model, once per recipe, from the same start on the same data, and a report of them.

``config`` says what is asked, ``data`` reads the text, ``loop`` trains, ``progress`` shows it, ``report`` and
``plot`` write it down, and ``job`` is the order of those. Beyond one GPU, TorchTitan is the trainer.
"""
