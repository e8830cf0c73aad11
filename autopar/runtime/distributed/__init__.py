"""The runtime of many processes: one per host or per GPU, in one JAX world, each with its part of the program.

placed             where a value lies on the cluster             (plain data, all processes agree on it)
arrivals           how the arguments of a step come to be there  (plain data, made once per way they lie)
distributed_array  what the driver holds of a value
host_program       the program in one process
host               one process: world, programs, values          (an actor of Ray, or a plain object)
ray_cluster        processes by Ray
ray_session        the driver: one message per process and step; losses
"""
