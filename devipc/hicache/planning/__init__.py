"""From pages to copies: runs, strips, forms and cuts, chosen by what this machine's copies cost.

Owns numbers only: no module here touches memory or calls a driver.
"""
