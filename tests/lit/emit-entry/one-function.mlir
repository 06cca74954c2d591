// There is one function to enter.
// RUN: gossamer-opt %s -p emit-entry --split-input-file --verify-diagnostics

// expected-error @unknown {{emit-entry needs one public function, the module has 2}}
func.func @one() {
  return
}
func.func @two() {
  return
}

// -----

// A private function is not entered.
// expected-error @unknown {{emit-entry needs one public function, the module has 0}}
func.func private @inner() {
  return
}
