"""Everything that names NVIDIA FLARE. Others come in by `federation/engine.py`.

front         what is behind that door
executor      a site's process: the site's session as an executor, the allow-list as an outgoing filter
exchange      the server's messages to its sites, and which of them it has heard of
controller    the server's process: the server's session as a controller
logins        the server's main process: removed people
resumer       the server's main process: continues a run whose job ended, keeps the stores
launcher      a site's main process: starts the job process again when it dies
provision     start-up kits
keys          keys that are made where they live, and who may no longer take part
kit_texts     what a kit says to whoever opens it
processes     starting and stopping a participant from its kit
child         a process that ends with the one that started it
admin         submit, status, stop
rehearse      a whole federation on one machine
"""
