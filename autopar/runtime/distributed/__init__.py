"""The runtime of many processes: one per host or per GPU, in one JAX world, each with its part of the program.

Where values lie, as plain data that all processes agree on:

    pieces             where a value lies on the cluster
    input_routing      how the arguments of a step come to be where it wants them; made once per way they lie
    whole_arrays       a value as one array, and the program that moves values

The driver, from the user's call to the processes:

    array              what the driver holds of a value
    driver             a loaded program: one call is one step
    session            one message per process and step; values by number; values from their shards
    replies            what the processes reply, or the one reason why they do not
    watchdog           a thread that sees processes die, fall silent, or fail
    ray_cluster        the processes, by Ray
    many_controllers   no driver: a session in every process, all of which make the same calls
    messages           what the driver and the processes say to each other

A process, from the message to the devices:

    ray_actor          a host as Ray calls it
    host               one process: its world, programs and values; a plain object
    world              all devices, whose they are, and how values reach the others
    host_inputs        the arguments, brought to where the program wants them
    host_program       the program's instructions that are this process's
    host_batches       values brought before a step
    host_checkpoint    states written and read
    host_checks        a collective and a transfer, tried
"""
