# ballast_find_nccl() and ballast_find_cublas(): the targets nvidia::nccl and nvidia::cublas, where CUDAToolkit was found
# and the library is there; the caller asks if(TARGET ...). Nothing is downloaded.
#
# Looked for in BALLAST_NVIDIA_WHEELS, in the CUDA toolkit, in the system, and last in the PyPI wheels that Python_EXECUTABLE,
# or else the Python on the PATH, has (nvidia-nccl-cu13, nvidia-cublas; a pip-installed torch brings both). Wheels have
# lib*.so.N, but no plain lib*.so: libraries are found by their full path, and their folder goes into the rpath of what is built.

set(BALLAST_NVIDIA_WHEELS "" CACHE PATH "A site-packages folder whose NVIDIA libraries are taken before all others")

function(ballast_find_nccl)
  ballast_find_nvidia(nccl HEADER nccl.h SO_VERSION 2)
endfunction()

function(ballast_find_cublas)
  ballast_find_nvidia(cublas HEADER cublas_v2.h SO_VERSION ${CUDAToolkit_VERSION_MAJOR})
endfunction()

function(ballast_find_nvidia name)
  cmake_parse_arguments(PARSE_ARGV 1 arg "" "HEADER;SO_VERSION" "")
  if(NOT CUDAToolkit_FOUND OR TARGET nvidia::${name})
    return()
  endif()
  ballast_nvidia_folders(chosen ${name} "${BALLAST_NVIDIA_WHEELS}/nvidia")
  ballast_python_nvidia(installed)
  ballast_nvidia_folders(wheels ${name} ${installed})

  find_library(BALLAST_${name}_LIBRARY NAMES ${name} lib${name}.so.${arg_SO_VERSION}
    HINTS ${chosen} ${CUDAToolkit_LIBRARY_DIR} PATHS ${wheels} PATH_SUFFIXES lib)
  cmake_path(GET BALLAST_${name}_LIBRARY PARENT_PATH folder)
  find_path(BALLAST_${name}_INCLUDE ${arg_HEADER} # of the same package, if it has one
    HINTS ${folder}/../include ${chosen} ${CUDAToolkit_INCLUDE_DIRS} PATHS ${wheels} PATH_SUFFIXES include)
  mark_as_advanced(BALLAST_${name}_LIBRARY BALLAST_${name}_INCLUDE)
  if(NOT BALLAST_${name}_LIBRARY OR NOT BALLAST_${name}_INCLUDE)
    message(STATUS "Ballast: ${name} not found; install it, or its wheel, and name that in BALLAST_NVIDIA_WHEELS")
    return()
  endif()
  message(STATUS "Ballast: ${name} is ${BALLAST_${name}_LIBRARY}")
  add_library(nvidia::${name} SHARED IMPORTED GLOBAL)
  set_target_properties(nvidia::${name} PROPERTIES
    IMPORTED_LOCATION ${BALLAST_${name}_LIBRARY}
    INTERFACE_INCLUDE_DIRECTORIES ${BALLAST_${name}_INCLUDE})
endfunction()

# Where wheels put a library, below each of their `nvidia` folders.
function(ballast_nvidia_folders answer name)
  set(folders "")
  foreach(root IN LISTS ARGN)
    list(APPEND folders ${root}/cu${CUDAToolkit_VERSION_MAJOR} ${root}/${name})
  endforeach()
  set(${answer} ${folders} PARENT_SCOPE)
endfunction()

function(ballast_python_nvidia answer)
  find_program(BALLAST_PYTHON_PROGRAM python3)
  mark_as_advanced(BALLAST_PYTHON_PROGRAM)
  set(folders "")
  set(python ${Python_EXECUTABLE} ${BALLAST_PYTHON_PROGRAM})
  if(python)
    list(GET python 0 python)
    set(ask "import importlib.util as u; s = u.find_spec('nvidia'); print(*(s.submodule_search_locations if s else ()), sep=';')")
    # pip hides what the environment has from what it builds.
    execute_process(COMMAND ${CMAKE_COMMAND} -E env --unset=PYTHONPATH --unset=PYTHONNOUSERSITE ${python} -c "${ask}"
      OUTPUT_VARIABLE folders ERROR_QUIET OUTPUT_STRIP_TRAILING_WHITESPACE)
  endif()
  set(${answer} ${folders} PARENT_SCOPE)
endfunction()
