#include <ballast/view.h>

#include <catch2/catch.hpp>
#include <vector>

using namespace ballast;

TEST_CASE("a view knows its elements, bytes and format") {
  std::vector<bf16> values(5);
  const View view{std::span(values)};
  CHECK(view.count() == 5);
  CHECK(view.bytes() == 10);
  CHECK(view.dtype() == DType::bf16);
  CHECK(view.as<bf16>().data() == values.data());
}

TEST_CASE("a view read in another format is refused") {
  std::vector<float> values(3);
  const ConstView view = View{std::span(values)};
  CHECK_THROWS_AS(view.as<bf16>(), UsageError);
}

TEST_CASE("a part lies inside its view") {
  std::vector<float> values(10);
  const View view{std::span(values)};
  CHECK(view.part(4, 6).as<float>().data() == values.data() + 4);
  CHECK(view.part(10, 0).count() == 0);
  CHECK_THROWS_AS(view.part(4, 7), UsageError);
  CHECK_THROWS_AS(view.part(11, 0), UsageError);
  CHECK_THROWS_AS(view.part(1, SIZE_MAX), UsageError);
}
