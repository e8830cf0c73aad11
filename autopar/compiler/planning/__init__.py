"""Turn a method into a plan.

    demands/    what the user fixed: layouts, kinds and degrees of parallelism, scopes, stages    ->  constraints
    stages/     layers, what ranges of them cost on submeshes, the layouts of every stage           ->  stages
    by_hand/    methods that say themselves what the plan is                                        ->  Plan
    search/     all others: the best of one program on one mesh, stages, and lanes                  ->  Plan

Beside them stands what all of these use: one program on one mesh, bounds of a step, and plans that are kept.
"""
