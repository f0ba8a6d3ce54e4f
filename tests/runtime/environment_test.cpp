#include <ballast/error.h>

#include "kernels/runtime/environment.h"

#include <stdlib.h>

#include <catch2/catch.hpp>
#include <map>

using namespace ballast;

namespace {

Environment made_of(std::map<std::string, std::string> variables) {
  return Environment([variables = std::move(variables)](const std::string& name) {
    const auto found = variables.find(name);
    return found == variables.end() ? std::nullopt : std::optional(found->second);
  });
}

}  // namespace

TEST_CASE("variables are read with their types") {
  const Environment environment = made_of({{"RANK", "3"}, {"LOW", "-7"}, {"HOST", "node7"}});
  CHECK(environment.integer("RANK") == 3);
  CHECK(environment.integer("LOW") == -7);
  CHECK(environment.text("HOST") == "node7");
}

TEST_CASE("an empty variable counts as unset") {
  const Environment environment = made_of({{"EMPTY", ""}});
  for (const char* name : {"EMPTY", "MISSING"}) {
    CHECK_FALSE(environment.text(name));
    CHECK_FALSE(environment.integer(name));
  }
}

TEST_CASE("a variable that cannot be read is an error that names it") {
  const Environment environment = made_of({{"X", "3 apples"}, {"HUGE", "99999999999999999999"}});
  CHECK_THROWS_WITH(environment.integer("X"), Catch::Contains("B1006") && Catch::Contains("X=\"3 apples\""));
  CHECK_THROWS_AS(environment.integer("HUGE"), UsageError);
}

TEST_CASE("the process's own environment is the default") {
  setenv("BALLAST_TEST_VARIABLE", "12", 1);
  CHECK(Environment().integer("BALLAST_TEST_VARIABLE") == 12);
  unsetenv("BALLAST_TEST_VARIABLE");
  CHECK_FALSE(Environment().integer("BALLAST_TEST_VARIABLE"));
}
