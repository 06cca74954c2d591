// A maximum takes the first row whatever it is, then greater ones, and says where it is from; seven columns leave a lane.
// RUN: gossamer-opt %s -p 'expose-storage,lower-sum-bags{bits=256}' | filecheck %s

// CHECK-LABEL: func.func @maxima(
// CHECK:         vector.maskedload {{.*}} : memref<?x7xf16>
// CHECK:         arith.extf {{.*}} : vector<8xf16> to vector<8xf32>
// CHECK:         arith.cmpf ogt
// CHECK:         arith.truncf
// CHECK:         vector.maskedstore {{.*}} : memref<?x7xf16>
// CHECK:         vector.maskedstore {{.*}} : memref<?x7xi32>
func.func @maxima(%lines: tensor<?x?xi64>) -> tensor<?xi64> {
  %wrong = "kernel.sum_bags"(%lines) {kind = "max", element = "f16", integers = "i64", weights = "none", columns = 7 : i64, wide = 0 : i64}
    : (tensor<?x?xi64>) -> tensor<?xi64>
  return %wrong : tensor<?xi64>
}
