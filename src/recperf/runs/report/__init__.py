"""Reports of runs and profiles: built once as blocks, rendered as text for a terminal or as one HTML page.

    run_report.write([Path("runs/a")], Path("runs/a/report.html"))
    blocks.render(profile_report.report(profile))

Building and printing text needs neither matplotlib nor jinja2; a page does (`pip install 'recperf[pages]'`).
"""
