"""Instances in the shape datasets have them: one of SWE-bench with the script its package's generator makes
for it, one of SWE-Gym; and their logs.
"""

from polarnode.core.conversation import Json

# django__django-10914 as SWE-bench Verified has it, some of its 99 tests left out.
DJANGO_TEST_PATCH = '''\
diff --git a/tests/test_utils/tests.py b/tests/test_utils/tests.py
--- a/tests/test_utils/tests.py
+++ b/tests/test_utils/tests.py
@@ -1099,7 +1099,7 @@ def test_override_file_upload_permissions(self):
         the file_permissions_mode attribute of
         django.core.files.storage.default_storage.
         """
-        self.assertIsNone(default_storage.file_permissions_mode)
+        self.assertEqual(default_storage.file_permissions_mode, 0o644)
         with self.settings(FILE_UPLOAD_PERMISSIONS=0o777):
             self.assertEqual(default_storage.file_permissions_mode, 0o777)
'''
DJANGO_SCRIPT = f"""\
#!/bin/bash
set -uxo pipefail
source /opt/miniconda3/bin/activate
conda activate testbed
cd /testbed
git config --global --add safe.directory /testbed
cd /testbed
git status
git show
git -c core.fileMode=false diff e7fd69d051eaa67cb17f172a39b57253e9cb831a
python -m pip install -e .
git checkout e7fd69d051eaa67cb17f172a39b57253e9cb831a tests/test_utils/tests.py
git apply -v - <<'EOF_114329324912'
{DJANGO_TEST_PATCH}
EOF_114329324912
: '>>>>> Start Test Output'
./tests/runtests.py --verbosity 2 --settings=test_sqlite --parallel 1 test_utils.tests
: '>>>>> End Test Output'
git checkout e7fd69d051eaa67cb17f172a39b57253e9cb831a tests/test_utils/tests.py
"""
FAILS = "test_override_file_upload_permissions (test_utils.tests.OverrideSettingsTests)"
PASSES = (
    "test_allowed_database_chunked_cursor_queries (test_utils.tests.AllowedDatabaseQueriesTests)",
    "test_skip_if_db_feature (test_utils.tests.SkippingTestCase)",
    "test_equal_parsing_errors (test_utils.tests.JSONEqualTests)",
)
DJANGO: dict[str, Json] = {
    "instance_id": "django__django-10914",
    "repo": "django/django",
    "version": "3.0",
    "base_commit": "e7fd69d051eaa67cb17f172a39b57253e9cb831a",
    "test_patch": DJANGO_TEST_PATCH,
    "FAIL_TO_PASS": f'["{FAILS}"]',
    "PASS_TO_PASS": list(PASSES),
    "image": "swebench/sweb.eval.x86_64.django_1776_django-10914:latest",
    "eval_script": DJANGO_SCRIPT,
    "log_parser": "parse_log_django",
    "eval_type": "pass_and_fail",
}
BEFORE = """\
+ git checkout e7fd69d051eaa67cb17f172a39b57253e9cb831a tests/test_utils/tests.py
Updated 0 paths from 5dfe7b6a4a
+ git apply -v -
Checking patch tests/test_utils/tests.py...
Applied patch tests/test_utils/tests.py cleanly.
+ : '>>>>> Start Test Output'
+ ./tests/runtests.py --verbosity 2 --settings=test_sqlite --parallel 1 test_utils.tests
Testing against Django installed in '/testbed/django'
Creating test database for alias 'default' ('file:memorydb_default?mode=memory&cache=shared')...
"""


def django_log(*, fails: tuple[str, ...] = (), missing: tuple[str, ...] = (), forged: str = "") -> str:
    """What the script printed, tests of these names failing or never run."""
    lines = [
        f"{name} ... {'FAIL' if name in fails else 'ok'}" for name in (FAILS, *PASSES) if name not in missing
    ]
    code = 1 if fails else 0
    after = (
        f"+ SWEBENCH_TEST_EXIT_CODE={code}\n+ : '>>>>> End Test Output'\n+ echo '>>>>> Test Exit Code:"
        f" {code}'\n>>>>> Test Exit Code: {code}\n"
    )
    return (
        f"{forged}{BEFORE}"
        + "\n".join(lines)
        + f"\n\nRan 99 tests in 2.101s\n\n{'FAILED' if fails else 'OK'}\n{after}"
    )


# getmoto__moto-5752 as SWE-Gym has it: the older columns, and a repository the package does not know.
MOTO: dict[str, Json] = {
    "instance_id": "getmoto__moto-5752",
    "repo": "getmoto/moto",
    "version": "4.0",
    "base_commit": "b2300f1eae1323e3e8bc45f97e530ce129dff12e",
    "test_patch": (
        """\
diff --git a/tests/test_ssm/test_ssm_boto3.py b/tests/test_ssm/test_ssm_boto3.py
--- a/tests/test_ssm/test_ssm_boto3.py
+++ b/tests/test_ssm/test_ssm_boto3.py
@@ -1 +1,2 @@
 import string
+import boto3
diff --git a/tests/test_ssm/data.json b/tests/test_ssm/data.json
new file mode 100644
--- /dev/null
+++ b/tests/test_ssm/data.json
@@ -0,0 +1 @@
+{}
diff --git a/tests/test_ssm/test_old.py b/tests/test_ssm/test_old.py
deleted file mode 100644
--- a/tests/test_ssm/test_old.py
+++ /dev/null
@@ -1 +0,0 @@
-import boto3
"""
    ),
    "FAIL_TO_PASS": [
        "tests/test_ssm/test_ssm_boto3.py::test_get_parameters_should_only_return_unique_requests"
    ],
    "PASS_TO_PASS": ["tests/test_ssm/test_ssm_boto3.py::test_get_parameters_by_path"],
}
