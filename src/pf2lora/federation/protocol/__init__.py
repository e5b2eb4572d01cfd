"""The two halves of a federated run and what passes between them. Knows nothing of FLARE.

plan          what a run is: settings, sites, timeouts and update checks
signed_plan   a plan with the signature of a lead, without which no site takes it
names         what sites and runs may be called
messages      a message as bytes, and the common adapter as named tensors
allow_list    what a message may hold; the one place where it is decoded and checked
problems      what a site may say about its own problems
site          a site's half: its answer to each request of the server
site_setup    what a site brings: its data, base model and method, from its own site.toml
policy        a site's own limits, from its own policy.toml
approvals     runs that a person at the site must approve
audit         what a participant let out, refused and decided, in a chain of hashes
batch_secret  the site's own part in the order of its batches
site_models   how good a site's models are, and which one it deploys
checkpoints   what a site keeps between rounds
agreement     what sites must have alike
server        the server's half: whom it asks, what it accepts, the merge, its checkpoint
update_checks which of a round's updates are taken
robust        merges that a few bad updates cannot pull far
private       what travels where updates get noise
masked        a masked run's messages, at a site and at the server
masked_fields what they may hold
secure_sum    sums whose parts nobody sees: keys, shares, masks
shamir, ring  a secret in shares; numbers that masks hide
identity      a site's certificate, to other sites; a lead's, to all of them
stopping      when a run ends before its last round
run_status    where a run stands, for whoever watches
outcome       a rehearsal's run folder
fetched       a finished run's folder for the lead
"""
