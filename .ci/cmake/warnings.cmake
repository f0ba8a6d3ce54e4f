# ballast_library(NAME SOURCES... LINKS targets...): a library of one layer, called ballast::NAME outside.

set(BALLAST_WARNINGS
  "$<$<COMPILE_LANGUAGE:CXX>:-Wall;-Wextra;-Wshadow;-Wconversion;-Wsign-conversion;-Wnon-virtual-dtor;-Wold-style-cast>")
# Files that are compiled as one see each other's names.
list(APPEND BALLAST_WARNINGS "$<$<AND:$<COMPILE_LANGUAGE:CXX>,$<BOOL:$<TARGET_PROPERTY:UNITY_BUILD>>>:-Wno-shadow>")
if(BALLAST_WARNINGS_AS_ERRORS)
  list(APPEND BALLAST_WARNINGS "$<$<COMPILE_LANGUAGE:CXX>:-Werror>" "$<$<COMPILE_LANGUAGE:CUDA>:--Werror=all-warnings>")
endif()

function(ballast_library name)
  cmake_parse_arguments(PARSE_ARGV 1 arg "" "" "SOURCES;LINKS")
  add_library(ballast_${name} STATIC ${arg_SOURCES})
  add_library(ballast::${name} ALIAS ballast_${name})
  target_include_directories(ballast_${name} PUBLIC
    $<BUILD_INTERFACE:${PROJECT_SOURCE_DIR}/kernels/include>
    $<BUILD_INTERFACE:${PROJECT_SOURCE_DIR}/optim/include>
    $<BUILD_INTERFACE:${PROJECT_SOURCE_DIR}/zero/include>)
  target_compile_features(ballast_${name} PUBLIC cxx_std_20)
  target_compile_options(ballast_${name} PRIVATE ${BALLAST_WARNINGS})
  target_link_libraries(ballast_${name} ${arg_LINKS})
endfunction()
