#include <ballast/error.h>

#include <fmt/format.h>
#include <catch2/catch.hpp>
#include <fstream>
#include <sstream>

#include "kernels/runtime/error_codes.h"

using namespace ballast;

namespace {

const char* const errors_md = BALLAST_SOURCE_DIR "/kernels/runtime/ERRORS.md";

std::string text_of(const char* file) {
  std::stringstream text;
  text << std::ifstream(file).rdbuf();
  return text.str();
}

// The content of ERRORS.md.
std::string codes_as_markdown() {
  std::string text =
      "# Error codes\n\n"
      "Generated from `error_codes.cpp`; a test keeps the two equal. B1…: the caller can correct it. B2…: the "
      "machine lacks\n"
      "something. B3…: hardware or a peer failed.\n\n"
      "| code | name | meaning | what to do |\n|---|---|---|---|\n";
  for (const CodeInfo& info : all_codes()) {
    const std::string_view remedy = info.remedy.empty() ? "The message says what is needed." : info.remedy;
    text += fmt::format("| {} | `{}` | {} | {} |\n", label(info.code), info.name, info.meaning, remedy);
  }
  return text;
}

}  // namespace

TEST_CASE("an error states what, where, needed, available, remedy and call site") {
  try {
    fail(Code::host_memory, {.what = "the staging buffer does not fit",
                             .where = "rank 3, unit h.7",
                             .needed = "12 GiB",
                             .available = "9 GiB",
                             .remedy = "lower prefetch to 2 units"});
    FAIL("fail() returned");
  } catch (const ResourceError& error) {
    const std::string text = error.what();
    CHECK(error.code() == Code::host_memory);
    for (const char* part : {"B2001", "the staging buffer does not fit", "rank 3, unit h.7", "12 GiB", "9 GiB",
                             "lower prefetch to 2 units", "error_test.cpp:"}) {
      CHECK(text.find(part) != std::string::npos);
    }
  }
}

TEST_CASE("an error without a remedy of its own carries its code's") {
  try {
    fail(Code::no_cuda_build, {.what = "cannot use a stream"});
  } catch (const Error& error) {
    CHECK(std::string(error.what()).find(describe(Code::no_cuda_build).remedy) != std::string::npos);
  }
}

TEST_CASE("the leading digit of a code chooses the exception type") {
  CHECK_THROWS_AS(fail(Code::bad_argument, {.what = "x"}), UsageError);
  CHECK_THROWS_AS(fail(Code::device_memory, {.what = "x"}), ResourceError);
  CHECK_THROWS_AS(fail(Code::cuda_call, {.what = "x"}), FailureError);
}

TEST_CASE("a requirement that holds builds no message") {
  require(true, Code::internal, []() -> Problem { throw std::logic_error("built a message"); });
}

TEST_CASE("every code of error.h stands in the table and describes itself") {
  std::stringstream header(text_of(BALLAST_SOURCE_DIR "/kernels/include/ballast/error.h"));
  std::size_t enumerators = 0;
  for (std::string line; std::getline(header, line);) {
    enumerators += line.find(" = ") != std::string::npos && line.back() == ',' ? 1u : 0u;
  }
  CHECK(enumerators == all_codes().size());
  for (const CodeInfo& info : all_codes()) {
    CHECK(describe(info.code).name == info.name);
    CHECK_FALSE(info.meaning.empty());
    const int number = static_cast<int>(info.code);  // the messages of these say what is needed
    CHECK(info.remedy.empty() == (number <= 1007 && number != 1006));
  }
}

TEST_CASE("ERRORS.md matches the error codes (renew it with: test_runtime '[write-errors-md]')") {
  CHECK(text_of(errors_md) == codes_as_markdown());
}

TEST_CASE("write ERRORS.md", "[.][write-errors-md]") { CHECK(std::ofstream(errors_md) << codes_as_markdown()); }
