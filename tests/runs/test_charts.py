def test_a(browser):
    page = browser.new_page()
    page.set_content("<p>hi")
    assert page.inner_text("p") == "hi"
