def test_a(published):
    r = published.labs("check")
    print(r.text)
    print(published.labs("publish").text)
    print(published.values.read_text())
    print(published.notebook().read_text())
    print((published.root / "README.md").read_text())
    assert 0
