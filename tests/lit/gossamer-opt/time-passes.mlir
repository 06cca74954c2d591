// One line a pass, in the order of the run, then the sum; all on standard error.
// RUN: gossamer-opt %s -p 'canonicalize,cse' --time-passes 2>&1 >%t | filecheck %s

// CHECK:      {{[0-9]+\.[0-9]+}} ms {{ *[0-9.]+}}%  canonicalize
// CHECK-NEXT: {{[0-9]+\.[0-9]+}} ms {{ *[0-9.]+}}%  cse
// CHECK-NEXT: {{[0-9]+\.[0-9]+}} ms 100.0%  total
func.func @f() {
  return
}
