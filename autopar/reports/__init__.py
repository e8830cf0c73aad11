"""Show what was planned, and what else could be.

description, plan_difference    a plan in tables, and two of them beside each other
explorer                        a plan as a page for the browser
changes, fixes                  what to write instead of a method, and what each comes to
chakra, dump                    files for other tools
"""
