from tasks.common.draft_checks.plan import check_plan as check_plan
