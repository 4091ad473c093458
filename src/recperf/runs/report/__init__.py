"""Reports of runs and profiles: built once as blocks, rendered as text for a terminal or as one HTML page.

    page.save(run_report.report(Evidence(Path("runs/a")), "r1"), Path("runs/a/report.html"))
    blocks.render(profile_report.report(profile))

Building and printing text does not need jinja2; a page does.
"""
